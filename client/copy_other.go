//go:build !amd64 || race

package client

// copyOut is copy for memory that this process does not read again.
func copyOut(to, from []byte) { copy(to, from) }
