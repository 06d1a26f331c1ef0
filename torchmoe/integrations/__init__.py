"""Adapters that let other libraries' models run on torchmoe's kernels; each imports its library only when called."""
