//go:build race

package worker_test

const raceFactor = 5
