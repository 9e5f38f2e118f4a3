package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/ckptstore/ckptstore/internal/terminal"
)

// marks are the table's marks for a status, with and without colour.
var marks = map[Status]struct{ plain, symbol, colour string }{
	OK:         {"OK", "✓", "\x1b[32m"},
	Warning:    {"WARN", "!", "\x1b[33m"},
	Problem:    {"FAIL", "✗", "\x1b[31m"},
	NotChecked: {"-", "-", "\x1b[02m"},
}

// Table writes the report for people: with plain ASCII marks, or with symbols in
// colour. The next step follows its check.
func (r Report) Table(w io.Writer, colour bool) error {
	table := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	for _, c := range r.Checks {
		mark := marks[c.Status].plain
		if colour {
			// All marks have the same width in bytes: the writer counts only
			// those.
			mark = marks[c.Status].colour + marks[c.Status].symbol + "\x1b[0m"
		}
		if _, err := fmt.Fprintf(table, "%s\t%s\t%s\n", mark, c.ID, oneLine(c.Saw)); err != nil {
			return err
		}
		if c.Do != "" && c.Status != OK {
			if _, err := fmt.Fprintf(table, "%s\t\t-> %s\n", blank(colour, c.Status), oneLine(c.Do)); err != nil {
				return err
			}
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "\n%d checks, %s, %s\n", len(r.Checks), count(r.Warnings, "warning"), count(r.Problems, "problem"))
	return err
}

// blank returns an invisible text with as many bytes as a coloured mark.
func blank(colour bool, s Status) string {
	if !colour {
		return ""
	}
	return marks[s].colour + " \x1b[0m"
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

func oneLine(text string) string { return terminal.Line(strings.Join(strings.Fields(text), " ")) }

// JSON writes the report for programs.
func (r Report) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(r)
}

// Err is nil if jobs can run on this machine.
func (r Report) Err() error {
	if r.Problems == 0 {
		return nil
	}
	return fmt.Errorf("%w: %d of %d checks; the report lists the next step of each", ErrFound, r.Problems, len(r.Checks))
}
