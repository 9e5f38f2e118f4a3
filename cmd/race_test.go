//go:build race

package cmd_test

// raceFlags build the commands as the tests are built.
var raceFlags = []string{"-race"}

// killSteps is the number of steps of a run that is killed. With the race detector a step
// takes four times as long, so runs are shorter; the number of kills is the same.
const killSteps = 200
