"""An HTTP server that speaks OpenAI's protocol: FastAPI and uvicorn in front of open bundles."""
