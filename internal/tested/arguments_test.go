package main

import (
	"slices"
	"strings"
	"testing"
)

// TestArguments: flags with a value of their own are not taken for packages, nor what follows a flag that only the
// tests know.
func TestArguments(t *testing.T) {
	for _, c := range []struct{ args, packages, with string }{
		{"./...", "./...", "-run=^(A)$ p"},
		{"", "", "-run=^(A)$ p"},
		{"-count=1 -timeout 5m ./cmd ./a/... -run TestX|TestY", "./cmd ./a/...", "-count=1 -timeout 5m -run=^(A)$ p"},
		{"-race -vet=off -timeout 25m -skip ^(B)$ a b -rapid.checks=20", "a b", "-race -vet=off -timeout 25m -skip ^(B)$ -run=^(A)$ p -rapid.checks=20"},
		{"-tags outlive -v --test.run=X a", "a", "-tags outlive -v -run=^(A)$ p"},
		{"-short a -parallel 2 b", "a", "-short -parallel 2 -run=^(A)$ p b"},
		{"-unknown a", "", "-run=^(A)$ p -unknown a"},
		{"a -unknown b -count 2 c", "a", "-count 2 -run=^(A)$ p -unknown b c"},
		{"a -run B -args -run C d", "a", "-run=^(A)$ p -args -run C d"},
		{"-cover -- a", "", "-cover -run=^(A)$ p -- a"},
	} {
		a := parse(strings.Fields(c.args))
		if got := strings.Join(a.packages, " "); got != c.packages {
			t.Errorf("%q: packages %q, want %q", c.args, got, c.packages)
		}
		if got := strings.Join(a.with("run", "^(A)$", "p"), " "); got != c.with {
			t.Errorf("%q: again %q, want %q", c.args, got, c.with)
		}
	}
}

// TestAgain: the second try is of the tests that failed. If others never began, it is of all that did not pass.
func TestAgain(t *testing.T) {
	ended := map[string]string{"TestA": "pass", "TestB": "fail", "TestB/x": "fail", "TestC": "skip"}
	open := map[string]int{"TestA": 0, "TestB": 0, "TestB/x": 0, "TestC": 0}
	slow := map[string]int{"TestA": 0, "TestB": 0, "TestB/x": 0, "TestC": 0, "TestD": 1}
	for _, c := range []struct {
		tests      tests
		args, want string
	}{
		{tests{ended: ended, open: open, whole: true}, "-run Test", "-run=^(TestB)$ p"},
		{tests{ended: ended, open: open, whole: true}, "-run Test -failfast", "-run Test -failfast -skip=^(TestA|TestC)$ p"},
		{tests{ended: ended, open: open, whole: true}, "-run Test/x", "-run Test/x -skip=^(TestA|TestC)$ p"},
		{tests{ended: ended, open: slow}, "-run Test -skip C|D/x", "-run Test -skip=C|D/x|^(TestA|TestC)$ p"},
		{tests{open: map[string]int{"TestD": 1}}, "-skip C", "-skip=C p"},
		{tests{ended: map[string]string{"TestA": "pass"}, open: map[string]int{"TestA": 0}, whole: true}, "", "p"},
		{tests{}, "-run Test", "-run Test p"},
	} {
		c.tests.name = "p"
		if got := c.tests.again(parse(strings.Fields(c.args))); !slices.Equal(got, strings.Fields(c.want)) {
			t.Errorf("%q: %q, want %q", c.args, got, c.want)
		}
	}
}
