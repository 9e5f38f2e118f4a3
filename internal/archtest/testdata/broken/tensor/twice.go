// Package tensor is explained twice.
package tensor
