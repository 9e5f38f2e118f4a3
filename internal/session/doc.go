// Package session serves one group of ranks, which may live on several nodes.
package session
