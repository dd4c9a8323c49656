"""The playground: a chat with any deployment through the same ingress as everybody's requests. Nothing is stored."""
