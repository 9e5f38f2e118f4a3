// Package plot draws lines as text for a terminal. It is pure.
package plot

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/ckptstore/ckptstore/internal/insight"
)

// Plot draws lines with the braille patterns of Unicode: each character is a cell of
// 2 × 4 dots.
//
//	2.31 ┤⡇⠀⠀⠀
//	     │⠱⡀⠀⠀
//	0.01 ┤⠀⠉⠒⠤
//	     └────
//	      from   to
type Plot struct {
	Width, Height int  // of the picture, in characters, with its labels
	Log           bool // logarithmic y axis
	Color         bool
	Left, Right   float64   // bounds of the x axis
	From, To      string    // labels of the bounds
	Less          [2]string // shorter labels, for narrow plots
}

// Size of a readable plot, in characters.
const (
	minWidth = 24
	Height   = 8
)

// canvas holds the cells of a plot.
type canvas struct {
	columns, rows int
	dots          [][]byte
	dim           [][]bool
}

func newCanvas(columns, rows int) *canvas {
	c := &canvas{columns: columns, rows: rows}
	for range rows {
		c.dots = append(c.dots, make([]byte, columns))
		c.dim = append(c.dim, make([]bool, columns))
	}
	return c
}

// braille is the bit of each dot of a cell, by row and column.
var braille = [4][2]byte{{0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}}

// set sets a dot; y counts from the bottom.
func (c *canvas) set(x, y int, dim bool) {
	y = 4*c.rows - 1 - y
	row, column := y/4, x/2
	if c.dots[row][column] == 0 || !dim {
		c.dim[row][column] = dim
	}
	c.dots[row][column] |= braille[y%4][x%2]
}

// line sets the dots on a straight line.
func (c *canvas) line(x0, y0, x1, y1 int, dim bool) {
	n := max(abs(x1-x0), abs(y1-y0))
	for i := range n + 1 {
		at := 0.0
		if n > 0 {
			at = float64(i) / float64(n)
		}
		c.set(x0+int(math.Round(at*float64(x1-x0))), y0+int(math.Round(at*float64(y1-y0))), dim)
	}
}

func abs(n int) int { return max(n, -n) }

// Draw draws all lines into one plot. It returns "" if no line has a number.
func (p Plot) Draw(lines []insight.Series) string {
	scale := func(v float64) float64 { return v }
	if p.Log {
		scale = math.Log10
	}
	low, high := math.Inf(1), math.Inf(-1)
	for _, s := range lines {
		for _, at := range s.Points {
			if !at.Gap {
				low, high = min(low, at.Least), max(high, at.Most)
			}
		}
	}
	if low > high {
		return ""
	}
	labels := map[int]string{0: axisNumber(high), p.Height - 1: axisNumber(low)}
	if low == high { // a single value: label the middle
		labels = map[int]string{p.Height / 2: axisNumber(low)}
	}
	margin := 0
	for _, text := range labels {
		margin = max(margin, utf8.RuneCountInString(text))
	}
	c := newCanvas(max(p.Width, minWidth)-margin-2, p.Height)
	column := func(x float64) int { return share(x, p.Left, p.Right, 2*c.columns-1, 0) }
	row := func(v float64) int {
		return share(scale(v), scale(low), scale(high), 4*c.rows-1, 2*c.rows-2)
	}
	for _, s := range lines {
		for i, at := range s.Points {
			if at.Gap {
				continue
			}
			x := column(at.X)
			c.line(x, row(at.Least), x, row(at.Most), s.Dim)
			if i > 0 && !s.Points[i-1].Gap {
				before := s.Points[i-1]
				c.line(column(before.X), row(before.End), x, row(at.End), s.Dim)
			}
		}
	}
	return p.print(c, labels, margin)
}

// share maps v from the range low to high to 0 to n. It returns middle if low equals high.
func share(v, low, high float64, n, middle int) int {
	if low == high {
		return middle
	}
	// Use halves: high - low may overflow.
	return int(math.Round((v/2 - low/2) / (high/2 - low/2) * float64(n)))
}

// Escape sequences of terminals.
const (
	colored = "\x1b[36m"
	dimmed  = "\x1b[2m"
	plain   = "\x1b[0m"
)

func (p Plot) print(c *canvas, labels map[int]string, margin int) string {
	var out strings.Builder
	for y := range c.rows {
		tick := "│"
		if labels[y] != "" {
			tick = "┤"
		}
		fmt.Fprintf(&out, "%*s %s", margin, labels[y], tick)
		end := c.columns // trim trailing blanks
		for end > 0 && c.dots[y][end-1] == 0 {
			end--
		}
		style := ""
		for x := range end {
			want := ""
			if p.Color && c.dots[y][x] != 0 {
				want = colored
				if c.dim[y][x] {
					want = dimmed
				}
			}
			if want != style {
				if style != "" {
					out.WriteString(plain)
				}
				out.WriteString(want)
				style = want
			}
			if c.dots[y][x] == 0 {
				out.WriteByte(' ')
			} else {
				out.WriteRune(0x2800 + rune(c.dots[y][x]))
			}
		}
		if style != "" {
			out.WriteString(plain)
		}
		out.WriteByte('\n')
	}
	fmt.Fprintf(&out, "%*s └%s\n", margin, "", strings.Repeat("─", c.columns))
	from, to := p.From, p.To
	if len(from)+len(to) >= c.columns {
		from, to = p.Less[0], p.Less[1]
	}
	fmt.Fprintf(&out, "%*s  %s%*s\n", margin, "", from, max(c.columns-len(from), len(to)+1), to)
	return out.String()
}

// axisNumber formats a number with the digits that an axis needs.
func axisNumber(v float64) string { return strconv.FormatFloat(v, 'g', 4, 64) }
