"""HTTP server with the OpenAI API: FastAPI and uvicorn over open bundles."""
