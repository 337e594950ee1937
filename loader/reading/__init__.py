"""From numbers of samples to their bytes: which file is opened when, read again after errors, watched."""
