"""Pure planning: (spec, observed, now) → what to do. No clock, no files, no cluster; pods and processes alike."""
