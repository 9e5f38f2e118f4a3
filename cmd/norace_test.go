//go:build !race

package cmd_test

// raceFlags build the commands as the tests are built.
var raceFlags []string

// killSteps are the steps of one run that is killed.
const killSteps = 400
