"""The process that proposes blocks. Imports worker, protocol, execution and speculative."""
