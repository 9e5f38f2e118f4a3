package auditreport

import (
	"bufio"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"html"
	"io"
)

// style is the whole style of the page. The page allows it by its digest, and nothing else.
const style = `
:root{color-scheme:light dark;--ink:#1b1f24;--faint:#57606a;--line:#d0d7de;--paper:#fff;--band:#f6f8fa}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--faint:#9da7b3;--line:#3d444d;--paper:#0d1117;--band:#161b22}}
*{box-sizing:border-box}
body{margin:0 auto;padding:2rem 1.5rem 4rem;max-width:100rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 1rem;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
p{margin:.4rem 0;color:var(--faint)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1.2rem;margin:0}
dt{color:var(--faint)}
dd{margin:0;overflow-wrap:anywhere}
.wide{overflow-x:auto;border:1px solid var(--line);border-radius:6px}
table{border-collapse:collapse;width:100%;font-size:.87rem}
th,td{text-align:left;vertical-align:top;padding:.35rem .6rem;border-bottom:1px solid var(--line)}
tbody tr:last-child td{border-bottom:0}
tbody tr:nth-child(even){background:var(--band)}
th{color:var(--faint);font-weight:600;background:var(--band);white-space:nowrap}
td{overflow-wrap:break-word;unicode-bidi:isolate}
.number,.time{font-variant-numeric:tabular-nums;white-space:nowrap}
.number{text-align:right}
.long{overflow-wrap:anywhere;min-width:11rem}
td.code{font-family:ui-monospace,monospace;font-size:.82rem;overflow-wrap:anywhere;min-width:9rem}
@page{size:A4 landscape;margin:12mm}
@media print{:root{--ink:#000;--faint:#333;--line:#999;--paper:#fff;--band:#fff}
body{padding:0;max-width:none;font-size:10px}.wide{overflow:visible;border:0}table{font-size:8px}td.code{font-size:7.5px;min-width:0}.long{min-width:0}td{overflow-wrap:anywhere}.time{white-space:normal;min-width:5em}
thead{display:table-header-group}tr{break-inside:avoid}h2{break-after:avoid}th{white-space:normal}}
`

// policy is the content security policy of the page.
func policy() string {
	sum := sha256.Sum256([]byte(style))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'; base-uri 'none'; form-action 'none'"
}

// HTML writes the report as one file that needs no other: no script, no link, no image. Text of
// the log stands between tags and in quoted attributes only, where [html.EscapeString] is
// enough. Package html/template would keep every exported method of the program from being
// left out by the linker: 10 MB.
func (r Report) HTML(w io.Writer) error {
	d, out := r.document(), bufio.NewWriterSize(w, 1<<16) // of which Flush returns the first error
	write := func(format string, texts ...string) {
		escaped := make([]any, len(texts))
		for i, t := range texts {
			escaped[i] = html.EscapeString(t)
		}
		fmt.Fprintf(out, format, escaped...)
	}
	write(`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="%s">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>%s</title>
<style>`, policy(), d.Title)
	_, _ = out.WriteString(style)
	write(`</style>
</head>
<body>
<main>
<h1>%s</h1>
<dl>
`, d.Title)
	for _, f := range d.Facts {
		write("<dt>%s</dt><dd>%s</dd>\n", f.Name, f.Value)
	}
	write("</dl>\n")
	for _, s := range d.Sections {
		write("<section>\n<h2>%s</h2>\n", s.Title)
		if len(s.Rows) > 0 {
			s.table(write)
		} else {
			write("<p>%s</p>\n", s.Note)
		}
		write("</section>\n")
	}
	write("</main>\n</body>\n</html>\n")
	return out.Flush()
}

// table writes the rows of a section.
func (s section) table(write func(format string, texts ...string)) {
	write(`<div class="wide" role="region" aria-label="%s" tabindex="0"><table>`+"\n<thead><tr>", s.Title)
	cell := func(open string, c column, text string) {
		if c.As != "" {
			write(open+` class="%s">%s`, c.As, text)
		} else {
			write(open+">%s", text)
		}
	}
	for _, c := range s.Columns {
		cell(`<th scope="col"`, c, c.Name)
		write("</th>")
	}
	write("</tr></thead>\n<tbody>\n")
	for _, row := range s.Rows {
		write("<tr>")
		for i, text := range row {
			cell("<td", s.Columns[i], text)
			write("</td>")
		}
		write("</tr>\n")
	}
	write("</tbody>\n</table></div>\n")
}
