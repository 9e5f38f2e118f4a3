package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const docsPage = "../docs/reference/events.md"

// TestDocs checks that the page about events matches the doc comments, the golden files
// and the compiled examples. Run with -update to write it.
func TestDocs(t *testing.T) {
	old, err := os.ReadFile(docsPage)
	if err != nil {
		t.Fatal(err)
	}
	d := readDocs(t, "bodies.go", "checkpoint.go", "node.go")
	page := string(old)
	page = between(t, page, "example", "```go\n"+function(t, "example_test.go", "ExampleDecode")+"```")
	page = between(t, page, "read", "```go\n"+function(t, filepath.Join("jetlog", "example_test.go"), "ExampleLog_Read")+"```")
	page = between(t, page, "kinds", d.kinds(t))
	if page == string(old) {
		return
	}
	if !*update {
		t.Fatalf("%s is stale: run `go generate ./events`", docsPage)
	}
	if err := os.WriteFile(docsPage, []byte(page), 0o644); err != nil {
		t.Fatal(err)
	}
}

// between replaces the text between two marks.
func between(t *testing.T, page, mark, text string) string {
	t.Helper()
	begin, end := "<!-- "+mark+": begin -->\n", "<!-- "+mark+": end -->"
	head, rest, ok := strings.Cut(page, begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no marks %q", docsPage, mark)
	}
	return head + begin + text + "\n" + end + tail
}

// function returns the body of a function as written in its file, without the expected
// output.
func function(t *testing.T, file, name string) string {
	t.Helper()
	source, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	set := token.NewFileSet()
	parsed, err := parser.ParseFile(set, file, source, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	for _, decl := range parsed.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Name.Name != name {
			continue
		}
		body := string(source[set.Position(f.Body.Lbrace).Offset+2 : set.Position(f.Body.Rbrace).Offset])
		body, _, _ = strings.Cut(body, "\t// Output:")
		var b strings.Builder
		for line := range strings.Lines(body) {
			b.WriteString(strings.TrimPrefix(line, "\t"))
		}
		return b.String()
	}
	t.Fatalf("%s has no %s", file, name)
	return ""
}

// docs holds the types of the files and their doc comments.
type docs struct {
	types map[string]*ast.StructType
	text  map[string]string // doc comment of a type
}

func readDocs(t *testing.T, files ...string) docs {
	t.Helper()
	d := docs{types: map[string]*ast.StructType{}, text: map[string]string{}}
	for _, file := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range parsed.Decls {
			g, ok := decl.(*ast.GenDecl)
			if !ok || g.Tok != token.TYPE {
				continue
			}
			spec := g.Specs[0].(*ast.TypeSpec)
			d.types[spec.Name.Name] = spec.Type.(*ast.StructType)
			d.text[spec.Name.Name] = g.Doc.Text()
		}
	}
	return d
}

// kinds returns one section for each kind, sorted by name, followed by the parts.
func (d docs) kinds(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	names := slices.Sorted(maps.Keys(kinds))
	b.WriteString("| type | | meaning |\n|---|---|---|\n")
	for _, k := range names {
		fmt.Fprintf(&b, "| [%s](#%s) | %s | %s |\n", k, strings.ReplaceAll(string(k), ".", ""), character(k), firstSentence(d.sentence(t, bodyName(k))))
	}
	parts := map[string]bool{}
	for _, k := range names {
		golden, err := os.ReadFile(goldenPath(k))
		if err != nil {
			t.Fatal(err)
		}
		var m Message
		if err := json.Unmarshal(golden, &m); err != nil {
			t.Fatal(err)
		}
		var data bytes.Buffer
		if err := json.Indent(&data, m.Data, "", "  "); err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "\n### %s\n\n%s, version 1. %s\n\n`%s`\n\n```json\n%s\n```\n\n", k, character(k), d.sentence(t, bodyName(k)), m.Subject, strings.TrimRight(data.String(), "\n"))
		d.fields(t, &b, bodyName(k), parts)
	}
	b.WriteString("\n## Parts\n")
	for done := map[string]bool{}; len(done) < len(parts); {
		for _, part := range slices.Sorted(maps.Keys(parts)) {
			if done[part] {
				continue
			}
			done[part] = true
			fmt.Fprintf(&b, "\n### %s\n\n%s\n\n", part, d.sentence(t, part))
			d.fields(t, &b, part, parts)
		}
	}
	return strings.TrimRight(b.String(), "\n")
}

func character(k Kind) string {
	if k.Decides() {
		return "Decision"
	}
	return "Fact"
}

func bodyName(k Kind) string { return reflect.TypeOf(kinds[k].zero()).Elem().Name() }

// sentence returns a type's doc comment for people who do not read Go.
func (d docs) sentence(t *testing.T, name string) string {
	t.Helper()
	text := strings.Join(strings.Fields(d.text[name]), " ")
	if text == "" {
		t.Fatalf("type %s has no doc comment", name)
	}
	for k := range kinds {
		text = strings.ReplaceAll(text, "["+bodyName(k)+"]", "`"+string(k)+"`")
	}
	for _, cut := range []string{" records that ", " records ", " is ", " "} {
		if rest, ok := strings.CutPrefix(text, name+cut); ok {
			text = strings.ToUpper(rest[:1]) + rest[1:]
			break
		}
	}
	return strings.NewReplacer("[MaxInline]", strconv.Itoa(MaxInline)+" bytes", "<", "&lt;").Replace(text)
}

func firstSentence(text string) string {
	if i := strings.Index(text, ". "); i > 0 {
		return text[:i+1]
	}
	return text
}

// fields writes the table of a type's members. It adds the parts that they refer to.
func (d docs) fields(t *testing.T, b *strings.Builder, name string, parts map[string]bool) {
	t.Helper()
	b.WriteString("| member | type | |\n|---|---|---|\n")
	for _, f := range d.types[name].Fields.List {
		tag, err := strconv.Unquote(f.Tag.Value)
		if err != nil {
			t.Fatal(err)
		}
		member, options, _ := strings.Cut(reflect.StructTag(tag).Get("json"), ",")
		text := strings.Join(strings.Fields(f.Comment.Text()), " ")
		if text == "" {
			text = usual[member]
		}
		if text == "" {
			t.Errorf("%s.%s has no comment: describe it", name, f.Names[0].Name)
		}
		if strings.Contains(options, "omitempty") || strings.Contains(options, "omitzero") {
			text += " (may be left out)"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", member, d.typeName(t, f.Type, parts), text)
	}
}

func (d docs) typeName(t *testing.T, e ast.Expr, parts map[string]bool) string {
	t.Helper()
	switch e := e.(type) {
	case *ast.Ident:
		switch e.Name {
		case "string":
			return "string"
		case "int", "int64", "uint64":
			return "integer"
		case "float64":
			return "number"
		case "bool":
			return "true or false"
		case "byte":
			return "byte"
		case "any":
			return "number or string"
		}
		if d.types[e.Name] == nil {
			t.Fatalf("the type %s is in none of the files", e.Name)
		}
		parts[e.Name] = true
		return "[" + e.Name + "](#" + strings.ToLower(e.Name) + ")"
	case *ast.StarExpr:
		return d.typeName(t, e.X, parts)
	case *ast.MapType:
		return "object"
	case *ast.ArrayType:
		of := d.typeName(t, e.Elt, parts)
		if of == "byte" {
			return "base64 string"
		}
		return "array of " + of
	}
	t.Fatalf("a type of an unknown form: %T", e)
	return ""
}

// usual describes the members that many kinds share.
var usual = map[string]string{
	"attempt":    "life of the trial's worker group, counted from 1 over all jobs",
	"job":        "the trainer's launch, a UUID",
	"node":       "index of the node in the job",
	"host":       "its name",
	"pid":        "process ID of the trainer",
	"command":    "of a worker",
	"nproc":      "workers per node",
	"nnodes":     "nodes",
	"exit_code":  "of the trainer",
	"reason":     "for people",
	"message":    "for people",
	"rank":       "rank in the group",
	"local_rank": "rank on its node",
	"devices":    "UUIDs of its GPUs",
	"world_size": "ranks of the group",
	"ranks":      "placement of each rank, or the ranks concerned",
	"backend":    "of the worker group",
	"resume":     "full ID of the checkpoint to continue from",
	"code":       "exit code; negative when killed by a signal",
	"signal":     "name, such as SIGKILL",
	"traceback":  "in the format of the worker's language",
	"config":     "the trial's configuration",
	"parent":     "what a fork continues from",
	"run":        "name of the run",
	"trial":      "name of the trial",
	"checkpoint": "ID of the checkpoint",
	"step":       "training step",
	"metrics":    "reported values by name",
	"bytes":      "size in bytes",
	"error":      "for people",
	"device":     "UUID of the GPU",
	"load":       "number of the load in its attempt, from 1",
	"name":       "name of the checkpoint, such as step-200",
	"size":       "in bytes",
	"digest":     "BLAKE3-256, hexadecimal",
	"inline":     "the bytes themselves",

	"participants":       "ranks that take part, ascending",
	"disagreements":      "replicas of this save whose bytes differ between ranks",
	"more_disagreements": "number of those that did not fit the event",
	"fqn":                "name of the tensor or value",
	"sizes":              "of the box, one per dimension",
	"files":              "files written",
	"index_digest":       "BLAKE3-256 of the rank's index file",
	"bytes_written":      "bytes of chunks written",
	"bytes_reused":       "bytes of chunks already stored, by an earlier checkpoint or under another name",
	"tag":                "the additional name",
	"index":              "number of the node in the run",
}
