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

// tests are the tests of a package that is not over.
type tests struct {
	output []line
	ended  map[string]string // test to pass, skip or fail
}

// filter reads the events of `go test -json` to their end. It prints the lines of passed packages and the
// output of failed tests, and records the tests that passed and that were skipped.
func filter(events io.Reader, stdout, record io.Writer) error {
	packages := map[string]*tests{}
	lines := bufio.NewReader(events)
	for {
		text, err := lines.ReadBytes('\n')
		if len(text) > 0 {
			if err := one(packages, text, stdout, record); err != nil {
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
func one(packages map[string]*tests, text []byte, stdout, record io.Writer) error {
	var e event
	if json.Unmarshal(text, &e) != nil {
		_, err := stdout.Write(text) // the go command's own message
		return err
	}
	p := packages[e.Package]
	if p == nil {
		p = &tests{ended: map[string]string{}}
		packages[e.Package] = p
	}
	switch e.Action {
	case "build-output":
		_, err := io.WriteString(stdout, e.Output)
		return err
	case "output":
		p.output = append(p.output, line{e.Test, e.Output})
	case "pass", "skip", "fail":
		if e.Test == "" {
			delete(packages, e.Package)
			return p.print(stdout, e.Action == "fail")
		}
		p.ended[e.Test] = e.Action
		return p.record(record, e)
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
func (p *tests) print(w io.Writer, failed bool) error {
	for _, l := range p.output {
		switch {
		case failed && (p.ended[l.test] == "pass" || p.ended[l.test] == "skip"):
			continue
		case !failed && (l.test != "" || !strings.HasPrefix(l.text, "ok ") && !strings.HasPrefix(l.text, "? ")):
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
