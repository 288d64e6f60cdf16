"""The operator in a cluster: kopf triggers, one level-based reconcile decides and acts. Never imports kopf but in `handlers`."""
