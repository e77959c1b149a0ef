"""TandemRT: a draft and a target model, compiled into engines and run in tandem under exact constraints."""
