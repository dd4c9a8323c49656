"""The cell proxy: the one door to a cell's engine. It measures, probes, admits and drains; it decides nothing about the
fleet."""
