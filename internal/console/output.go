// Package console is shared by the programs' command lines: streams, output
// formats, usage errors, texts of sizes and times, progress, and questions on a
// terminal.
//
//	table, wide   for people: control characters from stores are escaped
//	json, jsonl   for programs: exact; one object, or one object a line
//
// A mistake in the command line is a [UsageError]; each program gives it an exit
// code of its own.
package console

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

// Streams are the standard streams of a command.
type Streams struct {
	In       io.Reader
	Out, Err io.Writer
}

// Console holds a command's streams and output format. All commands share one, so
// that they honour the same flags.
type Console struct {
	Name     string    // of the program, printed before its warnings
	Out, Err io.Writer // for people: text from stores is escaped, see package terminal
	Raw      io.Writer // stdout itself, for bytes and for drawing
	Screen   io.Writer // stderr itself, for the progress bar
	Format   string    // table, wide, json or jsonl
	JSON     bool
	Quiet    bool
}

// FormatFlags adds the flags that choose the format.
func (c *Console) FormatFlags(f *pflag.FlagSet) {
	f.StringVarP(&c.Format, "output", "o", "table", "output: table, wide, json or jsonl")
	f.BoolVar(&c.JSON, "json", false, "the same as --output json")
}

// CheckFormat checks the requested format, and prepares the streams for it.
func (c *Console) CheckFormat() error {
	if c.JSON {
		c.Format = "json"
	}
	switch c.Format {
	case "table", "wide":
		return nil
	case "json", "jsonl":
		c.Out = c.Raw // exact, for programs
		return nil
	}
	return Usagef("--output %q: want table, wide, json or jsonl", c.Format)
}

// Emit prints a result: as one JSON object, its rows as JSON lines, or a table.
func Emit[Row any](c *Console, whole any, rows []Row, table func(w *tabwriter.Writer, wide bool)) error {
	switch c.Format {
	case "json":
		enc := json.NewEncoder(c.Out)
		enc.SetIndent("", "  ")
		return enc.Encode(whole)
	case "jsonl":
		enc := json.NewEncoder(c.Out)
		for _, r := range rows {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(c.Out, 0, 8, 2, ' ', 0)
	table(w, c.Format == "wide")
	return w.Flush()
}

// Row prints one line of a table.
func Row(w *tabwriter.Writer, cells ...any) {
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
