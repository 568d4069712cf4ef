"""Support code of the tests: real servers, a proxy that loses replies, one interface for both ledgers."""
