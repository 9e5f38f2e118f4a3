package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// event is a line of `go test -json`.
type event struct {
	Action  string
	Package string
	Test    string // "" for the package
	Output  string
}

// line is output of a test that has not been printed.
type line struct{ test, text string }

// tests are the tests of a package.
type tests struct {
	name   string
	output []line            // until the package is over
	open   map[string]int    // test to how often it began and did not end
	ended  map[string]string // test to pass, skip, fail or bench; fail if it also passed
	failed bool              // the package
	whole  bool              // the program of the tests reported that tests failed: it was not cut short
	race   bool              // the race detector found a data race
}

// filter prints the lines of passed packages and the output of failed tests, and records the tests that
// passed and that were skipped.
type filter struct {
	stdout, record io.Writer
	running        map[string]*tests // by package
	over           []*tests
}

// read reads the events of `go test -json` to their end.
func (f *filter) read(events io.Reader) error {
	lines := bufio.NewReader(events)
	for {
		text, err := lines.ReadBytes('\n')
		if len(text) > 0 {
			if err := f.one(text); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// one handles a line of `go test -json`.
func (f *filter) one(text []byte) error {
	var e event
	if json.Unmarshal(text, &e) != nil {
		_, err := f.stdout.Write(text) // the go command's own message
		return err
	}
	if e.Package == "" { // of a build
		_, err := io.WriteString(f.stdout, e.Output)
		return err
	}
	p := f.running[e.Package]
	if p == nil {
		p = &tests{name: e.Package, open: map[string]int{}, ended: map[string]string{}}
		f.running[e.Package] = p
	}
	switch e.Action {
	case "run":
		p.open[e.Test]++
	case "output":
		p.output = append(p.output, line{e.Test, e.Output})
		p.whole = p.whole || e.Test == "" && e.Output == "FAIL\n"
		p.race = p.race || strings.Contains(e.Output, "WARNING: DATA RACE")
	case "pass", "skip", "fail", "bench":
		if e.Test == "" {
			p.failed = e.Action == "fail"
			err := p.print(f.stdout)
			p.output = nil
			delete(f.running, e.Package)
			f.over = append(f.over, p)
			return err
		}
		p.open[e.Test]--
		if p.ended[e.Test] != "fail" {
			p.ended[e.Test] = e.Action
		}
		return p.record(f.record, e)
	}
	return nil
}

// record writes the line of a test that passed or was skipped.
func (p *tests) record(w io.Writer, e event) (err error) {
	switch e.Action {
	case "pass":
		_, err = fmt.Fprintf(w, "pass\t%s\t%s\n", e.Package, e.Test)
	case "skip":
		_, err = fmt.Fprintf(w, "skip\t%s\t%s\t%s\n", e.Package, e.Test, p.reason(e.Test))
	}
	return err
}

// reason returns the last lines that a skipped test logged.
func (p *tests) reason(test string) string {
	var logged []string
	for _, l := range p.output {
		text := strings.Join(strings.Fields(l.text), " ")
		if l.test == test && text != "" && !progress(l.text) && !strings.HasPrefix(text, "--- SKIP") {
			logged = append(logged, text)
		}
	}
	if len(logged) == 0 {
		return "no reason given"
	}
	return strings.Join(logged, " ")
}

// print prints the output of a package at its end, as `go test` does without -v.
func (p *tests) print(w io.Writer) error {
	for _, l := range p.output {
		switch {
		case p.failed && (p.ended[l.test] == "pass" || p.ended[l.test] == "skip"):
			continue
		case !p.failed && (l.test != "" || !strings.HasPrefix(l.text, "ok ") && !strings.HasPrefix(l.text, "? ")):
			continue
		case progress(l.text):
			continue
		}
		if _, err := io.WriteString(w, l.text); err != nil {
			return err
		}
	}
	return nil
}

// progress reports whether a line is one of those that only -v prints.
func progress(text string) bool {
	for _, prefix := range []string{"=== RUN", "=== PAUSE", "=== CONT", "=== NAME"} {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}
