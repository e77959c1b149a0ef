"""Answer a file of requests in the batch format of OpenAI, with the requests and answers of the server."""
