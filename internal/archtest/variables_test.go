package archtest

import (
	"go/ast"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
)

const variablesPage = "docs/reference/configuration.md"

// testPrograms are directories whose variables no user sets: programs for tests only, and modules
// of their own.
var testPrograms = []string{
	"deploy", "examples", "release",
	"internal/manynodes", "internal/natstest", "internal/object/s3test", "internal/storm", "internal/testbed",
}

var (
	// family matches variables that belong to this project, or to programs that it works with. Code
	// that sets them or reads them through a function of its own has their names as strings.
	family       = regexp.MustCompile(`^(AWS|CKPTSTORE|CUDA|KUBERNETES|OTEL|SLURM|TORCHELASTIC|XDG)_[A-Z0-9_]*[A-Z0-9]$`)
	variableName = regexp.MustCompile(`^[A-Z][A-Z0-9_]*$`)
	// onPage matches a variable of the page, or a prefix of several.
	onPage = regexp.MustCompile("`([A-Z][A-Z0-9_]*)(\\*?)`")
)

// TestConfigurationPageHasEveryVariable compares the page with the environment variables that the
// programs read.
func TestConfigurationPageHasEveryVariable(t *testing.T) {
	tree := os.DirFS(root(t))
	page, err := fs.ReadFile(tree, variablesPage)
	if err != nil {
		t.Fatal(err)
	}
	read := variablesOf(t, tree)
	if len(read) < 50 {
		t.Errorf("%d variables found", len(read))
	}
	for _, name := range missingVariables(read, string(page)) {
		t.Errorf("%s reads $%s, which %s does not have", read[name], name, variablesPage)
	}
}

func TestMissingVariableIsFound(t *testing.T) {
	tree := fstest.MapFS{
		"a/a.go": {Data: []byte(`package a

const EnvStore = "STORE"

func read() {
	os.Getenv("PLAIN")
	os.LookupEnv(b.EnvKey)
	for _, name := range []string{"FIRST", "SECOND"} {
		getenv(name)
	}
	getenv(EnvStore)
	get("SLURM_OF_A_FUNCTION")
	print("AWS_", "PLAIN TEXT")
}`)},
		"b/b.go":                   {Data: []byte("package b\n\nconst EnvKey = \"KEY\"\n")},
		"b/b_test.go":              {Data: []byte("package b\n\nvar _ = os.Getenv(\"OF_A_TEST\")\n")},
		"internal/testbed/main.go": {Data: []byte("package main\n\nvar _ = os.Getenv(\"OF_A_TESTBED\")\n")},
	}
	got := missingVariables(variablesOf(t, tree), "`STORE`, `KEY` and `FIR*`; not SECOND without quotes")
	if want := []string{"PLAIN", "SECOND", "SLURM_OF_A_FUNCTION"}; !slices.Equal(got, want) {
		t.Errorf("missing from the page: %q, want %q", got, want)
	}
}

// missingVariables returns the variables that a page does not have, in order.
func missingVariables(read map[string]string, page string) (missing []string) {
	names := onPage.FindAllStringSubmatch(page, -1)
	for _, name := range slices.Sorted(maps.Keys(read)) {
		if strings.HasPrefix(name, "CKPTSTORE_TEST") {
			continue // no setting: for tests only
		}
		if !slices.ContainsFunc(names, func(on []string) bool {
			return on[1] == name || on[2] != "" && strings.HasPrefix(name, on[1])
		}) {
			missing = append(missing, name)
		}
	}
	return missing
}

// variablesOf returns the environment variables that Go files of a tree read, each with a file that
// does. It finds names in calls of os.Getenv and the like: strings, constants and the strings of a
// loop. Of a family of variables it finds every string.
func variablesOf(t *testing.T, tree fs.FS) map[string]string {
	t.Helper()
	files := map[string]*ast.File{}
	constants := map[string][]string{} // of all packages, by their names
	eachGoFile(t, tree, testPrograms, func(name string, file *ast.File) {
		files[name] = file
		ast.Inspect(file, func(n ast.Node) bool {
			decl, ok := n.(*ast.GenDecl)
			if !ok || decl.Tok != token.CONST {
				return true
			}
			for _, spec := range decl.Specs {
				spec := spec.(*ast.ValueSpec)
				if len(spec.Names) == 1 {
					name := spec.Names[0].Name
					constants[name] = append(constants[name], slices.DeleteFunc(literals(spec.Values), isNoVariable)...)
				}
			}
			return true
		})
	})
	read := map[string]string{}
	for name, file := range files {
		loops := map[string][]string{}
		ast.Inspect(file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.RangeStmt:
				list, isList := n.X.(*ast.CompositeLit)
				each, isName := n.Value.(*ast.Ident)
				if isList && isName {
					loops[each.Name] = literals(list.Elts)
				}
			case *ast.BasicLit:
				if text, ok := literal(n); ok && family.MatchString(text) {
					read[text] = name
				}
			case *ast.CallExpr:
				if len(n.Args) == 1 && readsVariable(n.Fun) {
					for _, variable := range variablesIn(n.Args[0], constants, loops) {
						read[variable] = name
					}
				}
			}
			return true
		})
	}
	return read
}

// isNoVariable reports whether a text cannot be the name of an environment variable.
func isNoVariable(text string) bool { return !variableName.MatchString(text) }

// readsVariable reports whether a function is os.Getenv or os.LookupEnv, or has the place of one.
func readsVariable(fun ast.Expr) bool {
	switch fun := fun.(type) {
	case *ast.SelectorExpr:
		return fun.Sel.Name == "Getenv" || fun.Sel.Name == "LookupEnv"
	case *ast.Ident:
		return fun.Name == "getenv"
	}
	return false
}

// variablesIn returns the variables that the argument of such a function may name.
func variablesIn(arg ast.Expr, constants, loops map[string][]string) []string {
	name := ""
	switch arg := arg.(type) {
	case *ast.BasicLit:
		return literals([]ast.Expr{arg})
	case *ast.Ident:
		name = arg.Name
	case *ast.SelectorExpr:
		name = arg.Sel.Name
	}
	return slices.Concat(loops[name], constants[name])
}

// literals returns the strings in a list of expressions.
func literals(list []ast.Expr) (texts []string) {
	for _, e := range list {
		if text, ok := literal(e); ok {
			texts = append(texts, text)
		}
	}
	return texts
}

// literal returns the value of a string.
func literal(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(lit.Value)
	return text, err == nil
}
