//go:build race

package cmd_test

// raceFlags build the commands as the tests are built.
var raceFlags = []string{"-race"}
