// Package digits belongs to cmd/trainer.
package digits
