"""The agent that runs on every node and beside every ingress. It knows no Django and no database."""
