"""What the tests stand on: real servers, a proxy that loses replies, one face over both ledgers."""
