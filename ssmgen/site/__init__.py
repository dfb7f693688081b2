"""`ssmgen report`: kernels as a folder of web pages that needs no server and no network."""
