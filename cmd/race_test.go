//go:build race

package cmd_test

// raceFlags build the commands as the tests are built.
var raceFlags = []string{"-race"}

// killSteps are the steps of one run that is killed. With the race detector they
// take four times as long; the deaths are as many, in more runs.
const killSteps = 200
