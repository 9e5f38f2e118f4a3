package api

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite openapi.json and docs/reference/api.md")

const documentFile = "openapi.json"

// pageFile is the page about the API, whose tables are written from the document.
var pageFile = filepath.Join("..", "..", "docs", "reference", "api.md")

// tablesBegin is the line of the page after which its tables are written.
const tablesBegin = "<!-- operations: written by `go test ./internal/api -run TestDocument -update` -->\n"

// pageOf returns the page with the tables of a document.
func pageOf(t *testing.T, document string) string {
	t.Helper()
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatal(err)
	}
	head, _, found := strings.Cut(string(page), tablesBegin)
	if !found {
		t.Fatalf("%s lacks the line %s", pageFile, tablesBegin)
	}
	b := strings.Builder{}
	b.WriteString(head + tablesBegin)
	tree := parsed(t, []byte(document))
	paths := tree["paths"].(map[string]any)
	for _, tag := range tags {
		b.WriteString("\n### " + strings.ToUpper(tag[:1]) + tag[1:] + "\n\n| request | does | parameters | answer |\n|---|---|---|---|\n")
		for _, path := range slices.Sorted(maps.Keys(paths)) {
			for _, method := range []string{"get", "post", "put", "delete"} {
				op := dig(paths, path, method)
				if list, ok := dig(op, "tags").([]any); !ok || !slices.Contains(list, any(tag)) {
					continue
				}
				fmt.Fprintf(&b, "| `%s %s` | %s | %s | %s |\n", strings.ToUpper(method), strings.TrimPrefix(path, Prefix), summaryOf(op), parametersOf(op), answerOf(op))
			}
		}
	}
	return b.String()
}

// summaryOf returns what an operation does, on one line of a table.
func summaryOf(op any) string {
	text := fmt.Sprint(dig(op, "summary"), ".")
	if more, ok := dig(op, "description").(string); ok {
		text += " " + strings.ReplaceAll(more, "\n", " ")
	}
	return text
}

// parametersOf lists the parameters that only some operations have, and the members of the body.
func parametersOf(op any) string {
	var names []string
	for key, p := range parameters(op) {
		in, name, _ := strings.Cut(key, " ")
		if in != "query" || name == "as_of" || name == "at_least" || name == "limit" || name == "page" {
			continue
		}
		if name = "`" + name + "`"; dig(p, "required") == true {
			name += " (required)"
		}
		names = append(names, name)
	}
	slices.Sort(names)
	if body := dig(op, "requestBody", "content", "application/json", "schema", "$ref"); body != nil {
		names = append(names, "a body `"+path.Base(body.(string))+"`")
	}
	return strings.Join(names, ", ")
}

// answerOf names the schema of the answer.
func answerOf(op any) string {
	schema := dig(op, "responses", "200", "content", "application/json", "schema")
	if ref, ok := dig(schema, "$ref").(string); ok {
		return "`" + path.Base(ref) + "`"
	}
	if dig(op, "operationId") == "stream" {
		return "`text/event-stream`"
	}
	return "a CloudEvent"
}

// TestDocument compares the document with the recorded one. A change that breaks clients fails
// even with -update: remove the recorded file to make one.
func TestDocument(t *testing.T) {
	t.Parallel()
	h := newHarness(t, Options{})
	r := h.call("GET", Prefix+"/openapi.json", readToken1, "")
	recorded, err := os.ReadFile(documentFile)
	if err != nil && (!os.IsNotExist(err) || !*update) {
		t.Fatalf("%v: record it with -update", err)
	}
	if err == nil {
		for _, problem := range broken(parsed(t, recorded), parsed(t, []byte(r.body))) {
			t.Errorf("a client of the recorded document would break: %s", problem)
		}
	}
	if t.Failed() {
		return
	}
	if *update {
		if err := errors.Join(os.WriteFile(documentFile, []byte(r.body), 0o644), os.WriteFile(pageFile, []byte(pageOf(t, r.body)), 0o644)); err != nil {
			t.Fatal(err)
		}
		return
	}
	page, err := os.ReadFile(pageFile)
	if err != nil || string(page) != pageOf(t, r.body) {
		t.Errorf("%s differs from the document: write it with -update (%v)", pageFile, err)
	}
	if string(recorded) != r.body {
		t.Errorf("the document differs from %s: look at the difference, then record it with -update", documentFile)
	}
	if strings.Contains(r.body, "unpkg") || !strings.HasPrefix(parsed(t, recorded)["openapi"].(string), "3.1") {
		t.Error("the document is not of OpenAPI 3.1")
	}
}

func parsed(t *testing.T, text []byte) (tree map[string]any) {
	t.Helper()
	if err := json.Unmarshal(text, &tree); err != nil {
		t.Fatal(err)
	}
	return tree
}

// dig returns the member at a path, or nil.
func dig(tree any, path ...string) any {
	for _, name := range path {
		m, _ := tree.(map[string]any)
		tree = m[name]
	}
	return tree
}

// broken lists the changes from a document to another that break clients: a removed operation
// or parameter, a newly required or retyped one, a removed or retyped member of an answer, a
// newly required member of a request.
func broken(before, after map[string]any) (problems []string) {
	add := func(format string, values ...any) { problems = append(problems, fmt.Sprintf(format, values...)) }
	paths, _ := before["paths"].(map[string]any)
	for path, methods := range paths {
		for method, op := range methods.(map[string]any) {
			where, now := strings.ToUpper(method)+" "+path, dig(after, "paths", path, method)
			if now == nil {
				add("%s is gone", where)
				continue
			}
			was := parameters(op)
			for key, p := range was {
				q, ok := parameters(now)[key]
				switch {
				case !ok:
					add("%s: parameter %s is gone", where, key)
				case typeOf(dig(p, "schema")) != typeOf(dig(q, "schema")):
					add("%s: parameter %s is %s, was %s", where, key, typeOf(dig(q, "schema")), typeOf(dig(p, "schema")))
				case dig(q, "required") == true && dig(p, "required") != true:
					add("%s: parameter %s is required now", where, key)
				}
			}
			for key, q := range parameters(now) {
				if _, ok := was[key]; !ok && dig(q, "required") == true {
					add("%s: the new parameter %s is required", where, key)
				}
			}
			if dig(now, "requestBody", "required") == true && dig(op, "requestBody", "required") != true {
				add("%s: a body is required now", where)
			}
			for status := range op.(map[string]any)["responses"].(map[string]any) {
				if dig(now, "responses", status) == nil {
					add("%s: the answer %s is gone", where, status)
				}
			}
		}
	}
	schemas, _ := dig(before, "components", "schemas").(map[string]any)
	for name, schema := range schemas {
		now := dig(after, "components", "schemas", name)
		if now == nil {
			add("schema %s is gone", name)
			continue
		}
		members, _ := dig(schema, "properties").(map[string]any)
		for member, of := range members {
			switch is := dig(now, "properties", member); {
			case is == nil:
				add("%s.%s is gone", name, member)
			case typeOf(is) != typeOf(of):
				add("%s.%s is %s, was %s", name, member, typeOf(is), typeOf(of))
			}
		}
		was, _ := dig(schema, "required").([]any)
		required, _ := dig(now, "required").([]any)
		for _, member := range was { // of an answer
			if !slices.Contains(required, member) {
				add("%s.%s may be missing now", name, member)
			}
		}
		for _, member := range required { // of a request
			if !slices.Contains(was, member) && dig(schema, "properties", member.(string)) != nil {
				add("%s.%s is required now", name, member)
			}
		}
	}
	slices.Sort(problems)
	return problems
}

func parameters(op any) map[string]any {
	all := map[string]any{}
	list, _ := dig(op, "parameters").([]any)
	for _, p := range list {
		all[fmt.Sprint(dig(p, "in"), " ", dig(p, "name"))] = p
	}
	return all
}

// typeOf returns the type of a schema, with those of items and members.
func typeOf(schema any) string {
	text := fmt.Sprint(dig(schema, "type"), " ", dig(schema, "format"), " ", dig(schema, "$ref"))
	for _, inner := range []string{"items", "additionalProperties"} {
		if of, ok := dig(schema, inner).(map[string]any); ok {
			text += " of (" + typeOf(of) + ")"
		}
	}
	return text
}

// TestBreakingChanges: each of these changes of the recorded document is found, and nothing
// is found in additions.
func TestBreakingChanges(t *testing.T) {
	t.Parallel()
	recorded, err := os.ReadFile(documentFile)
	if err != nil {
		t.Fatal(err)
	}
	const runs, mark = Prefix + "/runs", Prefix + "/runs/{run}/checkpoints/{id}/pin"
	for what, change := range map[string]func(map[string]any){
		"runs is gone":              func(d map[string]any) { delete(d["paths"].(map[string]any), runs) },
		"query limit is gone":       func(d map[string]any) { drop(d, runs, "limit") },
		"query limit is string":     func(d map[string]any) { parameter(d, runs, "limit")["schema"] = map[string]any{"type": "string"} },
		"query limit is required":   func(d map[string]any) { parameter(d, runs, "limit")["required"] = true },
		"the new parameter query x": func(d map[string]any) { grow(d, runs, map[string]any{"in": "query", "name": "x", "required": true}) },
		"RunSummary.run is gone": func(d map[string]any) {
			delete(dig(d, "components", "schemas", "RunSummary", "properties").(map[string]any), "run")
		},
		"RunSummary.jobs is string": func(d map[string]any) {
			dig(d, "components", "schemas", "RunSummary", "properties", "jobs").(map[string]any)["type"] = "string"
		},
		"RunSummary.run may be missing": func(d map[string]any) {
			dig(d, "components", "schemas", "RunSummary").(map[string]any)["required"] = []any{}
		},
		"Fork.set is required now": func(d map[string]any) {
			dig(d, "components", "schemas", "Fork").(map[string]any)["required"] = []any{"name", "set"}
		},
		"a body is required": func(d map[string]any) {
			dig(d, "paths", mark, "put", "requestBody").(map[string]any)["required"] = true
		},
		"schema Why is gone": func(d map[string]any) { delete(dig(d, "components", "schemas").(map[string]any), "Why") },
	} {
		after := parsed(t, recorded)
		change(after)
		if found := strings.Join(broken(parsed(t, recorded), after), "\n"); !strings.Contains(found, what) {
			t.Errorf("%q is not found: %s", what, found)
		}
	}
	after := parsed(t, recorded)
	grow(after, runs, map[string]any{"in": "query", "name": "x"})
	dig(after, "components", "schemas", "RunSummary", "properties").(map[string]any)["more"] = map[string]any{"type": "string"}
	after["paths"].(map[string]any)[Prefix+"/more"] = map[string]any{"get": map[string]any{}}
	if found := broken(parsed(t, recorded), after); len(found) > 0 {
		t.Errorf("additions: %q", found)
	}
}

func operationOf(d map[string]any, path string) map[string]any {
	return dig(d, "paths", path, "get").(map[string]any)
}

func parameter(d map[string]any, path, name string) map[string]any {
	for _, p := range operationOf(d, path)["parameters"].([]any) {
		if dig(p, "name") == name {
			return p.(map[string]any)
		}
	}
	return nil
}

func drop(d map[string]any, path, name string) {
	op := operationOf(d, path)
	op["parameters"] = slices.DeleteFunc(op["parameters"].([]any), func(p any) bool { return dig(p, "name") == name })
}

func grow(d map[string]any, path string, p map[string]any) {
	op := operationOf(d, path)
	op["parameters"] = append(op["parameters"].([]any), p)
}
