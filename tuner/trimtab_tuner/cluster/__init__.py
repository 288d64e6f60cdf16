"""A tuning run in a cluster: what `trimtab-tuner work` does in a TuningRun's Job. The only part that knows Kubernetes."""
