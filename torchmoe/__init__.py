"""torchmoe: small composable modules for training Mixture-of-Experts models."""

__version__ = "0.1.0"
