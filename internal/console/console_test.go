package console

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"testing"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

// TestFormats checks that one result is a table for people, with control characters
// made visible, and exact JSON for programs.
func TestFormats(t *testing.T) {
	type line struct {
		Name string `json:"name"`
	}
	rows := []line{{"a\x1b"}, {""}}
	for format, want := range map[string]string{
		"table": "NAME\n\"a\\x1b\"\n-\n",
		"wide":  "NAME  WIDE\n\"a\\x1b\"\n-\n",
		"json":  "{\n  \"lines\": [\n    {\n      \"name\": \"a\\u001b\"\n    },\n    {\n      \"name\": \"\"\n    }\n  ]\n}\n",
		"jsonl": "{\"name\":\"a\\u001b\"}\n{\"name\":\"\"}\n",
	} {
		var out bytes.Buffer
		c := &Console{Out: &out, Raw: &out, Format: format}
		if err := c.CheckFormat(); err != nil {
			t.Fatal(err)
		}
		err := Emit(c, map[string]any{"lines": rows}, rows, func(w *tabwriter.Writer, wide bool) {
			head := []any{"NAME"}
			if wide {
				head = append(head, "WIDE")
			}
			Row(w, head...)
			for _, r := range rows {
				Row(w, r.Name)
			}
		})
		if err != nil || out.String() != want {
			t.Errorf("%s: %q (%v), want %q", format, out.String(), err, want)
		}
	}
	var usage UsageError
	if err := (&Console{Format: "xml"}).CheckFormat(); !errors.As(err, &usage) {
		t.Errorf("format xml: %v", err)
	}
}

// TestUsageErrors checks that each mistake in a command line is a UsageError, and
// that errors.Is finds its cause.
func TestUsageErrors(t *testing.T) {
	for _, args := range [][]string{{"none"}, {"--none"}, {"verb", "too many"}, {"verb", "--name="}} {
		root := &cobra.Command{
			Use:               "program",
			PersistentPreRunE: func(c *cobra.Command, _ []string) error { return NoneEmpty(c) },
		}
		verb := &cobra.Command{Use: "verb", Args: Args(cobra.NoArgs), RunE: func(*cobra.Command, []string) error { return nil }}
		verb.Flags().String("name", "default", "")
		root.AddCommand(verb)
		Program(root, args, io.Discard, io.Discard)
		var usage UsageError
		if err := root.Execute(); !errors.As(err, &usage) {
			t.Errorf("%q: %v is no usage error", args, err)
		}
	}
	if err := fmt.Errorf("outer: %w", Usagef("inner: %w", io.EOF)); !errors.Is(err, io.EOF) || err.Error() != "outer: inner: EOF" {
		t.Errorf("usage error %v", err)
	}
}
