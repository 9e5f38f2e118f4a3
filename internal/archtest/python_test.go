package archtest

import (
	"io/fs"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var (
	// A relative import of Python: the dots, the module, and the names in one line or in parentheses.
	relative = regexp.MustCompile(`(?m)^[ \t]*from[ \t]+(\.+)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n#]*)`)
	word     = regexp.MustCompile(`\w+`)
)

// pythonImports returns the modules of a package that each of its modules imports, by path
// without .py. A package's __init__.py only gathers names, so it counts as no module.
func pythonImports(t *testing.T, tree fs.FS, dir string) map[string][]string {
	t.Helper()
	modules := map[string]string{}
	if err := fs.WalkDir(tree, dir, func(name string, _ fs.DirEntry, err error) error {
		if err == nil && path.Ext(name) == ".py" && path.Base(name) != "__init__.py" {
			text, err := fs.ReadFile(tree, name)
			modules[strings.TrimSuffix(name, ".py")] = string(text)
			return err
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	imports := map[string][]string{}
	for module, text := range modules {
		for _, found := range relative.FindAllStringSubmatch(text, -1) {
			base := module
			for range found[1] {
				base = path.Dir(base)
			}
			wanted := []string{path.Join(base, strings.ReplaceAll(found[2], ".", "/"))}
			for _, name := range word.FindAllString(found[3], -1) { // "from . import a, b"
				wanted = append(wanted, path.Join(wanted[0], name))
			}
			for _, name := range wanted {
				if _, ok := modules[name]; ok {
					imports[module] = append(imports[module], name)
				}
			}
		}
	}
	return imports
}

// circle returns modules of which each imports the next and the last the first; nil if
// there are none.
func circle(imports map[string][]string) []string {
	done := map[string]bool{}
	var visit func(trail []string) []string
	visit = func(trail []string) []string {
		at := trail[len(trail)-1]
		if first := slices.Index(trail, at); first < len(trail)-1 {
			return trail[first:]
		}
		if done[at] {
			return nil
		}
		for _, next := range imports[at] {
			if found := visit(append(slices.Clone(trail), next)); found != nil {
				return found
			}
		}
		done[at] = true
		return nil
	}
	for _, module := range slices.Sorted(maps.Keys(imports)) {
		if found := visit([]string{module}); found != nil {
			return found
		}
	}
	return nil
}

// TestPythonModulesAreInOrder checks that no Python module imports, through others, itself.
// Imports within functions and for type checks count too.
func TestPythonModulesAreInOrder(t *testing.T) {
	const dir = "python/src/ckptstore"
	imports := pythonImports(t, os.DirFS(root(t)), dir)
	if !slices.Contains(imports[dir+"/_connect"], dir+"/_session") {
		t.Fatalf("%s/_connect imports %q: the imports are not read", dir, imports[dir+"/_connect"])
	}
	if found := circle(imports); found != nil {
		t.Errorf("a circle of imports: %s", strings.Join(found, " -> "))
	}
}

func TestPythonCircleIsFound(t *testing.T) {
	tree := fstest.MapFS{
		"p/a.py":              {Data: []byte("from .b import (\n    x,\n)\n")},
		"p/b.py":              {Data: []byte("def f():\n    from .inner import c\n")},
		"p/inner/c.py":        {Data: []byte("from .. import a\n")},
		"p/d.py":              {Data: []byte("from . import a, b\n")},
		"p/inner/__init__.py": {Data: []byte("from .c import x\n")},
	}
	if got, want := strings.Join(circle(pythonImports(t, tree, "p")), " "), "p/a p/b p/inner/c p/a"; got != want {
		t.Errorf("circle %q, want %q", got, want)
	}
}
