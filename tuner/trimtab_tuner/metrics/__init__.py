"""Reading Prometheus metrics: parse, scrape, query, and turn counters into numbers that a decision may rest on."""
