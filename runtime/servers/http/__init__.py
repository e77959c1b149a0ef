"""The HTTP server: FastAPI and uvicorn over open bundles, with the APIs of OpenAI and Anthropic."""
