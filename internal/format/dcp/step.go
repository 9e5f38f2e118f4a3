package dcp

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// step runs one opcode that the dialect allows.
func (m *machine) step(op byte) error {
	switch op {
	case opProto:
		n, err := m.number(1)
		if err == nil && (n < 2 || n > 5) {
			err = fmt.Errorf("protocol %d, those from 2 to 5 are read", n)
		}
		return err
	case opFrame:
		n, err := m.number(8)
		if left := uint64(len(m.data) - m.pos); err == nil && n > left {
			err = fmt.Errorf("frame of %d bytes, the pickle has %d left", n, left)
		}
		return err
	case opMark:
		m.marks = append(m.marks, len(m.stack))
	case opNone:
		m.push(nil)
	case opNewTrue, opNewFalse:
		m.push(op == opNewTrue)
	case opBinInt, opBinInt1, opBinInt2, opLong1, opLong4:
		return m.stepInteger(op)
	case opBinFloat:
		b, err := m.take(8)
		if err == nil {
			m.float(b)
		}
		return err
	case opShortBinUnicode, opBinUnicode, opBinUnicode8:
		b, err := m.counted(argSize[op])
		if err != nil {
			return err
		}
		return m.text(b)
	case opShortBinBytes, opBinBytes, opBinBytes8:
		b, err := m.counted(argSize[op])
		if err == nil {
			m.push(bytes.Clone(b))
		}
		return err
	case opMemoize:
		return m.put(uint64(len(m.memo)))
	case opBinPut, opLongBinPut, opBinGet, opLongBinGet:
		return m.stepMemo(op)
	case opGlobal, opStackGlobal:
		return m.stepGlobal(op)
	case opReduce, opNewObj, opBuild, opBinPersID:
		return m.stepObject(op)
	default:
		return m.stepContainer(op)
	}
	return nil
}

func (m *machine) stepInteger(op byte) error {
	switch op {
	case opLong1, opLong4:
		b, err := m.counted(argSize[op])
		if err != nil {
			return err
		}
		return m.integer(b)
	case opBinInt:
		n, err := m.number(argSize[op])
		m.push(int64(int32(n)))
		return err
	default:
		n, err := m.number(argSize[op])
		m.push(int64(n))
		return err
	}
}

func (m *machine) stepMemo(op byte) error {
	n, err := m.number(argSize[op])
	if err != nil {
		return err
	}
	if op == opBinPut || op == opLongBinPut {
		return m.put(n)
	}
	return m.get(n)
}

func (m *machine) stepGlobal(op byte) error {
	if op == opGlobal {
		var names [2]string
		for i := range names {
			n := bytes.IndexByte(m.data[m.pos:], '\n')
			if n < 0 {
				return errors.New("a name without its end")
			}
			names[i] = string(m.data[m.pos : m.pos+n])
			m.pos += n + 1
		}
		return m.find(global{names[0], names[1]})
	}
	v, err := m.pop(2)
	if err != nil {
		return err
	}
	module, ok := v[0].(string)
	name, ok2 := v[1].(string)
	if !ok || !ok2 {
		return errors.New("module and name are not strings")
	}
	return m.find(global{module, name})
}

func (m *machine) stepObject(op byte) error {
	if op == opBinPersID {
		v, err := m.pop(1)
		if err == nil {
			m.push(persistent{v[0]})
		}
		return err
	}
	v, err := m.pop(2)
	if err != nil {
		return err
	}
	if op == opBuild {
		object, ok := v[0].(*call)
		if !ok || object.built {
			return fmt.Errorf("%s can be given no state", kind(v[0]))
		}
		object.state, object.built = v[1], true
		m.push(object)
		return nil
	}
	fn, ok := v[0].(global)
	args, ok2 := v[1].(tuple)
	if !ok || !ok2 {
		return fmt.Errorf("want a global and a tuple, got %s and %s", kind(v[0]), kind(v[1]))
	}
	m.push(&call{fn: fn, args: args, new: op == opNewObj, pos: m.op})
	return nil
}

func (m *machine) stepContainer(op byte) error {
	switch op {
	case opEmptyTuple:
		m.push(tuple{})
	case opEmptyList:
		m.push(&list{})
	case opEmptyDict:
		m.push(&dict{})
	case opTuple, opAppends, opSetItems:
		items, err := m.popMark()
		if err != nil {
			return err
		}
		if op == opTuple {
			m.push(tuple(slices.Clone(items)))
			return nil
		}
		return m.extend(op, items)
	case opTuple1, opTuple2, opTuple3:
		items, err := m.pop(int(op-opTuple1) + 1)
		if err == nil {
			m.push(tuple(slices.Clone(items)))
		}
		return err
	case opAppend, opSetItem:
		n := 1
		if op == opSetItem {
			n = 2
		}
		items, err := m.pop(n)
		if err != nil {
			return err
		}
		return m.extend(op, items)
	default:
		return errors.New("is not known")
	}
	return nil
}

// extend adds items to the list or dict on top of the stack.
func (m *machine) extend(op byte, items []any) error {
	v, err := m.top()
	if err != nil {
		return err
	}
	switch c := v.(type) {
	case *list:
		if op == opAppend || op == opAppends {
			c.items = append(c.items, items...)
			return nil
		}
	case *dict:
		if op == opSetItem || op == opSetItems {
			if len(items)%2 != 0 {
				return errors.New("a key without its value")
			}
			c.pairs = append(c.pairs, items...)
			return nil
		}
	}
	return fmt.Errorf("cannot be done to %s", kind(v))
}

// kind returns Python's name of the kind of v.
func kind(v any) string {
	switch v := v.(type) {
	case nil:
		return "None"
	case bool:
		return "a bool"
	case int64:
		return "an int"
	case float64:
		return "a float"
	case string:
		return "a str"
	case []byte:
		return "bytes"
	case tuple:
		return "a tuple"
	case *list:
		return "a list"
	case *dict:
		return "a dict"
	case global:
		return "the global " + clip(v.String())
	case *call:
		return "an object of " + clip(v.fn.String())
	case persistent:
		return "a storage"
	default:
		return "a large int"
	}
}
