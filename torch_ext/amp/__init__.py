"""The gradient scaler of fp16 models."""
