package archtest

import (
	"fmt"
	"go/ast"
	"go/token"
	"strings"
)

// checkPackageComment requires exactly one package comment, so that readers know where
// to look.
func (c *checker) checkPackageComment(dir string, files []source) {
	var in []string
	for _, file := range files {
		if file.Doc.Text() != "" {
			in = append(in, file.path)
		}
	}
	switch len(in) {
	case 0:
		c.add(dir, token.NoPos, "package %s has no package comment", files[0].Name.Name)
	case 1:
	default:
		c.add(dir, token.NoPos, "package %s has %d package comments, in %s: keep one", files[0].Name.Name, len(in), strings.Join(in, ", "))
	}
}

// customary are methods whose meaning is the same everywhere.
var customary = []string{"Error", "Unwrap", "String", "Read", "Write", "ServeHTTP"}

// promised returns the methods that the package explains once, in an interface: the
// types that have them need no comment for them. The comment of an interface also
// covers its only method.
func promised(files []source) map[string]bool {
	names := map[string]bool{}
	for _, name := range customary {
		names[name] = true
	}
	for _, file := range files {
		for _, decl := range file.Decls {
			of, ok := decl.(*ast.GenDecl)
			if !ok || of.Tok != token.TYPE {
				continue
			}
			for _, spec := range of.Specs {
				spec := spec.(*ast.TypeSpec)
				iface, ok := spec.Type.(*ast.InterfaceType)
				if !ok {
					continue
				}
				only := iface.Methods.NumFields() == 1 && of.Doc.Text()+spec.Doc.Text() != ""
				for _, method := range iface.Methods.List {
					for _, name := range method.Names {
						if only || method.Doc.Text()+method.Comment.Text() != "" {
							names[name.Name] = true
						}
					}
				}
			}
		}
	}
	return names
}

// checkDocs requires a doc comment on every exported name of the package level and on
// every exported method of an exported type, unless it is promised. One comment serves
// a group of constants or variables, and so does one at the end of a line.
func (c *checker) checkDocs(file source, promised map[string]bool) {
	if ast.IsGenerated(file.File) {
		return
	}
	missing := func(name *ast.Ident, of string) {
		c.add(file.path, name.Pos(), "exported %s%s has no doc comment", of, name.Name)
	}
	for _, decl := range file.Decls {
		switch decl := decl.(type) {
		case *ast.FuncDecl:
			of, exported := receiver(decl)
			if exported && decl.Name.IsExported() && decl.Doc.Text() == "" && !(decl.Recv != nil && promised[decl.Name.Name]) {
				missing(decl.Name, of)
			}
		case *ast.GenDecl:
			for _, spec := range decl.Specs {
				for _, name := range undocumented(decl, spec) {
					missing(name, "")
				}
			}
		}
	}
}

// receiver returns "T." for a method of T and "" for a function, and whether other
// packages can see the function by its receiver.
func receiver(decl *ast.FuncDecl) (string, bool) {
	if decl.Recv == nil || len(decl.Recv.List) == 0 {
		return "", true
	}
	expr := decl.Recv.List[0].Type
	for {
		switch of := expr.(type) {
		case *ast.ParenExpr:
			expr = of.X
		case *ast.StarExpr:
			expr = of.X
		case *ast.IndexExpr:
			expr = of.X
		case *ast.IndexListExpr:
			expr = of.X
		case *ast.Ident:
			return of.Name + ".", of.IsExported()
		default:
			return "", true
		}
	}
}

// undocumented returns the exported names of a declaration without a comment.
func undocumented(decl *ast.GenDecl, spec ast.Spec) []*ast.Ident {
	switch spec := spec.(type) {
	case *ast.TypeSpec:
		// A comment on a group of types describes the group, not each type.
		group := decl.Lparen.IsValid() && len(decl.Specs) > 1
		if !spec.Name.IsExported() || spec.Doc.Text() != "" || spec.Comment.Text() != "" || !group && decl.Doc.Text() != "" {
			return nil
		}
		return []*ast.Ident{spec.Name}
	case *ast.ValueSpec:
		if decl.Doc.Text() != "" || spec.Doc.Text() != "" || spec.Comment.Text() != "" {
			return nil
		}
		var names []*ast.Ident
		for _, name := range spec.Names {
			if name.IsExported() {
				names = append(names, name)
			}
		}
		return names
	}
	return nil
}

// Table renders the rooms of the law as a Markdown table: path, duty, and the rooms
// that each may import. ARCHITECTURE.md holds it.
func (l Law) Table() string {
	var b strings.Builder
	b.WriteString("| room | holds | may import |\n|---|---|---|\n")
	for _, r := range l.Rooms {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", r.Path, r.Holds, r.imports())
	}
	return b.String()
}

func (r Room) imports() string {
	list := make([]string, len(r.May))
	for i, path := range r.May {
		if path == Any {
			return "every room"
		}
		list[i] = "`" + path + "`"
	}
	if len(list) == 0 {
		return "none"
	}
	return strings.Join(list, ", ")
}
