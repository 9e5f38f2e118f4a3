package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// CheckSizes checks the law's limits on a tree: files of a room, lines of a file,
// exported names.
func CheckSizes(tree fs.FS, law Law) ([]Finding, error) {
	c := &checker{law: law, fset: token.NewFileSet()}
	dirs, err := c.parse(tree)
	if err != nil {
		return nil, fmt.Errorf("check architecture: %w", err)
	}
	c.checkFiles(dirs)
	c.checkPublic(dirs)
	return c.ordered(), nil
}

// checkFiles finds rooms with too many files, files that could be part of another, and
// reasons in the law without a short file.
func (c *checker) checkFiles(dirs map[string][]source) {
	reasons := map[string]bool{}
	for _, s := range c.law.Short {
		reasons[s.Path] = s.Reason != ""
	}
	for _, files := range dirs {
		if len(files) > c.law.MaxFiles {
			c.add(path.Dir(files[0].path), token.NoPos, "%d files, at most %d are allowed: split the room", len(files), c.law.MaxFiles)
		}
		for _, file := range files {
			short := file.lines < c.law.MinLines && !ast.IsGenerated(file.File)
			if short && !reasons[file.path] {
				c.add(file.path, token.NoPos, "%d lines, at least %d are usual: make it part of the file of its topic, or give a reason in the law", file.lines, c.law.MinLines)
			}
			if short {
				delete(reasons, file.path)
			}
		}
	}
	for file := range reasons {
		c.add(file, token.NoPos, "the law has a reason for a short file, and it is not short")
	}
}

// checkPublic counts the names that other modules can use.
func (c *checker) checkPublic(dirs map[string][]source) {
	n := 0
	for dir, files := range dirs {
		if slices.Contains(strings.Split(dir, "/"), "internal") || files[0].Name.Name == "main" {
			continue
		}
		for _, file := range files {
			n += exported(file.File)
		}
	}
	if n > c.law.Public {
		c.add(".", token.NoPos, "%d exported functions, methods and types outside internal, at most %d are allowed: unexport what no user needs", n, c.law.Public)
	}
}

// exported counts the exported functions and types of a file, and exported methods of
// such types.
func exported(file *ast.File) (n int) {
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			if _, visible := receiver(decl); visible && decl.Name.IsExported() {
				n++
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				if spec, ok := spec.(*ast.TypeSpec); ok && spec.Name.IsExported() {
					n++
				}
			}
		}
	}
	return n
}
