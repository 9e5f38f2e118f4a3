// Package helpers is a drawer.
package helpers
