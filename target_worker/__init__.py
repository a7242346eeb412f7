"""The process that verifies drafted blocks. Imports worker, protocol, execution and speculative."""
