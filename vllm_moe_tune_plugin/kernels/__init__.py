"""The plugin's own Triton kernels. Imported at first use only: importing Triton costs time in processes without a GPU."""
