//go:build race

package launch_test

const raceFactor = 5
