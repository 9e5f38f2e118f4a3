package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"github.com/ckptstore/ckptstore/internal/terminal"
)

// console is where a command writes, and how.
type console struct {
	name     string    // of the program, before its warnings
	out, err io.Writer // for people: what stores say is made harmless, see package terminal
	raw      io.Writer // stdout itself, for bytes and for what is drawn here
	screen   io.Writer // stderr itself, for the progress bar
	output   string    // table, wide, json or jsonl
	json     bool
	quiet    bool
}

// formatFlags adds the flags that choose the format.
func (c *console) formatFlags(f *pflag.FlagSet) {
	f.StringVarP(&c.output, "output", "o", "table", "output: table, wide, json or jsonl")
	f.BoolVar(&c.json, "json", false, "the same as --output json")
}

// checkFormat checks the format that was asked for, and prepares for it.
func (c *console) checkFormat() error {
	if c.json {
		c.output = "json"
	}
	switch c.output {
	case "table", "wide":
		return nil
	case "json", "jsonl":
		c.out = c.raw // exact, for programs
		return nil
	}
	return usagef("--output %q: want table, wide, json or jsonl", c.output)
}

// emit prints a result: as one JSON object, its rows as JSON lines, or a table.
func emit[Row any](c *console, whole any, rows []Row, table func(w *tabwriter.Writer, wide bool)) error {
	switch c.output {
	case "json":
		enc := json.NewEncoder(c.out)
		enc.SetIndent("", "  ")
		return enc.Encode(whole)
	case "jsonl":
		enc := json.NewEncoder(c.out)
		for _, r := range rows {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(c.out, 0, 8, 2, ' ', 0)
	table(w, c.output == "wide")
	return w.Flush()
}

// row prints one line of a table.
func row(w *tabwriter.Writer, cells ...any) {
	text := make([]string, len(cells))
	for i, c := range cells {
		text[i] = fmt.Sprint(c)
		switch {
		case text[i] == "":
			text[i] = "-"
		case !terminal.IsLine(text[i]): // one line, one row
			text[i] = strconv.Quote(text[i])
		}
	}
	fmt.Fprintln(w, strings.Join(text, "\t"))
}
