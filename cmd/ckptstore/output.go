package main

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/terminal"
)

// emit prints a result: as one JSON object, its rows as JSON lines, or a table.
func emit[Row any](a *app, whole any, rows []Row, table func(w *tabwriter.Writer, wide bool)) error {
	switch a.output {
	case "json":
		enc := json.NewEncoder(a.out)
		enc.SetIndent("", "  ")
		return enc.Encode(whole)
	case "jsonl":
		enc := json.NewEncoder(a.out)
		for _, r := range rows {
			if err := enc.Encode(r); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(a.out, 0, 8, 2, ' ', 0)
	table(w, a.output == "wide")
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

// maybeSize is a size that may not be known.
func maybeSize(n *int64) string {
	if n == nil {
		return ""
	}
	return bytesize.Text(*n)
}

// when is a time for people, in their own zone.
func when(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.Local().Format(time.DateTime)
}

// short is the beginning of a digest.
func short(digest string) string { return digest[:min(len(digest), 12)] }
