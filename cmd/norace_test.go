//go:build !race

package cmd_test

// raceFlags build the commands as the tests are built.
var raceFlags []string

// killSteps is the number of steps of a run that is killed.
const killSteps = 400
