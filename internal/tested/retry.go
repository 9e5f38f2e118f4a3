package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// retry tests each failed package of a run again, except for what passed, and returns the exit code of this second
// try. It runs nothing, and returns 1, if the first try cannot be made good: after a data race, and if a package is
// unknown or none is known to have failed.
func retry(ctx context.Context, a arguments, first *filter, stderr io.Writer) (code int, err error) {
	var failed []*tests
	for _, p := range first.over {
		if p.race && p.failed {
			fmt.Fprintf(first.stdout, "== FAILED: %s: no second try after a data race\n", p.name)
			return 1, nil
		}
		if p.failed {
			failed = append(failed, p)
		}
	}
	if len(first.running) > 0 || len(failed) == 0 {
		fmt.Fprintln(first.stdout, "== FAILED: no second try: go test did not report on all packages")
		return 1, nil
	}
	for _, p := range failed {
		names := p.lacking()
		fmt.Fprintf(first.stdout, "== FAILED at first: %s\n", strings.Join(append([]string{p.name}, names...), " "))
		c, f, err := try(ctx, p.again(a), first.stdout, stderr, first.record)
		if err != nil {
			return max(c, 1), err
		}
		c, err = p.compare(f, c)
		if err != nil {
			return 1, err
		}
		code = max(code, c)
	}
	return code, nil
}

// lacking returns the top-level tests that failed or did not end.
func (p *tests) lacking() []string {
	return p.named(func(test string) bool { return p.open[test] > 0 || p.ended[test] == "fail" })
}

// named returns the top-level tests that began and for which a condition holds.
func (p *tests) named(holds func(test string) bool) []string {
	var names []string
	for _, test := range slices.Sorted(maps.Keys(p.open)) {
		if !strings.Contains(test, "/") && holds(test) {
			names = append(names, test)
		}
	}
	return names
}

// again returns the arguments of the second try for a package.
func (p *tests) again(a arguments) []string {
	lacking := p.lacking()
	if len(lacking) == 0 {
		return a.with("skip", a.value("skip"), p.name)
	}
	// A pattern with a slash also selects among subtests, and stays.
	if p.whole && !a.given("failfast") && !strings.Contains(a.value("run"), "/") {
		return a.with("run", exactly(lacking), p.name)
	}
	skip := a.value("skip")
	if passed := p.named(func(test string) bool { return !slices.Contains(lacking, test) }); len(passed) > 0 {
		skip = strings.TrimPrefix(skip+"|"+exactly(passed), "|")
	}
	return a.with("skip", skip, p.name)
}

// exactly returns a pattern that matches these tests, and no other.
func exactly(tests []string) string {
	quoted := make([]string, len(tests))
	for i, test := range tests {
		quoted[i] = regexp.QuoteMeta(test)
	}
	return "^(" + strings.Join(quoted, "|") + ")$"
}

// compare records the tests that failed at first and passed at the second try. It returns the exit code of the
// second try, or 1 if this try ended well and one of these tests did not pass.
func (p *tests) compare(second *filter, code int) (int, error) {
	var now *tests
	for _, s := range second.over {
		if s.name == p.name {
			now = s
		}
	}
	lacking := p.lacking()
	if code == 0 && len(lacking) == 0 {
		_, err := fmt.Fprintf(second.record, "unsteady\t%s\t\n", p.name)
		return code, err
	}
	ended := code
	for _, test := range lacking {
		if now != nil && now.open[test] == 0 && now.ended[test] == "pass" {
			if _, err := fmt.Fprintf(second.record, "unsteady\t%s\t%s\n", p.name, test); err != nil {
				return 1, err
			}
		} else if ended == 0 {
			fmt.Fprintf(second.stdout, "== FAILED: %s: %s failed at first, and was skipped or not found at the second try\n", p.name, test)
			code = 1
		}
	}
	return code, nil
}
