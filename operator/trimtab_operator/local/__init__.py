"""Local mode: the operator's plan carried out with processes in place of pods, behind one address."""
