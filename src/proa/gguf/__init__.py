"""GGUF files: headers, tensors and metadata, believed in nothing."""
