"""The gRPC gateway of an ingress: the Open Inference Protocol over the same HTTP API that all other clients use."""
