"""The playground: a chat with any deployment through its ingress, as applications reach it. Nothing is stored."""
